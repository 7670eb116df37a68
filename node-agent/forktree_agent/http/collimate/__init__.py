"""The protocol of Collimate, for programs that speak it already: two surfaces over what the native API does.

`gateway` is for callers with a token, `daemon` for whoever can reach the socket of a namespace. Neither has
a way of its own to open, fork or run anything.
"""
