"""Agent Lightning 1.0's REST API over this package's store and gateway, for its controller and its agents."""
