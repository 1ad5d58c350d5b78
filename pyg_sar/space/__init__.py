"""The distributed ``edge_index``: its operators, its derivations, and what is kept with it."""
