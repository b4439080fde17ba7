"""Who may come in: API keys, what they may do and how much of it, and TLS on the ports.

``files`` reads secrets and reads them again when they change; ``keys`` is the file of keys; ``limits`` counts what a
key uses; ``guard`` says yes or no to a call, and ``calls`` asks it in every proxy and in the ingress; ``process`` is
the guard that a process has, ``settings`` what proxies must know; ``tls`` is the certificates; ``owners`` has a number
for each key, by which requests, ids and caches are its own.
"""
