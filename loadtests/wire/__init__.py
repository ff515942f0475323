"""HTTP/1.1 for the load tools: one client, waited for or blocking, and an engine that answers by script.

What must stay true: both cost little beside what is measured, and a reply that is whole is told from one that
was cut. Why they are our own: docs/decisions/020-load-tools.md.
"""
