"""Tell from a few figures whether the content of a save can be right: `Checks`."""
