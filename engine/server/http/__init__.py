"""Below the routes: bytes of a connection, compressed bodies, the checks of every request, clients that leave.

The folder imports `engine.server.errors`, its settings and its log.
"""
