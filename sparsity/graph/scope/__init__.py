"""The scope `Coupled`: channels compete with all their entries, as they lie in a tree."""
