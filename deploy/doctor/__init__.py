"""What ``outrider doctor`` looks at."""
