"""The HTTP service: routes, limits, OpenAPI, the page to try a model."""
