"""The doors as strangers meet them: Serve's real proxies and the real ingress before a scripted target."""
