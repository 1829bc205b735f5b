//! The router core: sessions, fleet, residency, policies, admission, handoff, health.
