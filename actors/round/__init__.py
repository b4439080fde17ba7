"""One round: drafts in, a verified step, commits out, and everything rank 0 knows of a request."""
