//! Whole workers in this process, over real sockets on the loopback: what a client, a router and other workers see.

mod client;
mod http;
mod kv_events;
mod transfer;
