"""How a host stands before a port. nodes.py and link_check.py call it."""


def bracketed(host: str) -> str:
    """An IPv6 address in brackets, anything else as it is."""
    return f"[{host}]" if ":" in host else host
