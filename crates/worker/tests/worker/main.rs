//! Whole workers in this process, over real sockets on the loopback: what a client, a router and other workers see.

#[cfg(test)]
mod client;
#[cfg(test)]
mod holding;
#[cfg(test)]
mod http;
#[cfg(test)]
mod kv_events;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod transfer;
