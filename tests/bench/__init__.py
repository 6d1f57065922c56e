"""`make bench`: every figure of docs/benchmarks.md, measured on a private server."""
