"""The OpenAPI document of the HTTP port at ``/openapi.json``, and the page at ``/docs`` that shows it."""
