"""OpenTelemetry: the spans of requests, told to a collector by OTLP. docs/tracing.md is the page of it.

Off, nothing of this is imported but `start`. On, no request may be harmed by it, nor memory grow.
"""
