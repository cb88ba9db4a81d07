"""Print what commands find: lines, columns, outlines, errors."""
