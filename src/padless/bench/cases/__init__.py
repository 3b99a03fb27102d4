"""The benchmarks' own parts: points, contenders, records and tables (see `padless.bench.case`)."""
