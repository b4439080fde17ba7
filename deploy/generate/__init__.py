"""What ``outrider generate`` takes and prints."""
