"""The search that is fast on hosts: the masks are those of the portable one."""
