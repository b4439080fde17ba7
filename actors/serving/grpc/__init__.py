"""Implements the gRPC API: checks and converts requests, and converts outputs and errors."""
