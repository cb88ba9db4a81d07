"""Build the documentation site: `make docs`.

`docs/` stays plain Markdown that GitHub shows as it is. `staging` copies it, and makes of it what Zensical
builds; `checks` reads what came out.
"""
