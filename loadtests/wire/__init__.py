"""HTTP/1.1 for the load tools: one client, waited for or blocking, and the bytes that it sends.

What must stay true: a client costs little beside what it measures, and tells a reply that is whole from one
that was cut.
"""
