"""Tests the ingress over gRPC; a package, so that its tests share one cluster."""
