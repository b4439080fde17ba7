"""What ``outrider top`` reads and shows."""
