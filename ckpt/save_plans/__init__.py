"""Agree which rank writes what: ranks tell what they hold as columns and rules, not as DCP's objects."""
