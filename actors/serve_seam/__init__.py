"""All that leans on Ray Serve's private names: proxies, router, broadcasts, logs."""
