"""Reading whole tables under an exported snapshot, for copies and comparisons."""
