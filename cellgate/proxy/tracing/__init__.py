"""OpenTelemetry: spans of requests and metrics, sent to a collector by OTLP. See docs/tracing.md.

Off, only `start` is imported. On, it must not harm requests or let memory grow.
"""
