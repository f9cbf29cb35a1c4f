"""HTTP service: routes, limits, OpenAPI, and the page to try a model."""
