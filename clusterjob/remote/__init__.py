"""A host behind SSH: transport, authentication, host keys, session, fetch."""
