"""Below the routes: bytes of a connection, compressed bodies, what every request passes, clients that leave.

Imports `engine.server.errors`, its settings and its log.
"""
