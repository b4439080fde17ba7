"""What ``outrider bench`` is made of: loads, the other sides, and figures."""
