"""The aggregation: blocks of edges, reducers, and the passes over them."""
