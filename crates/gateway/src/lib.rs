//! The router's shell: HTTP proxy, engine subscriptions, health probes, telemetry, admin pages.
