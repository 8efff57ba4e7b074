"""The HTTP front end: connections, routes and handlers; ``conch.wire`` converts the bodies."""
