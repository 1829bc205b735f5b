//! The engine core through its public API, driven as a worker drives it.

mod driver;
mod eviction;
mod residents;
mod schedules;
mod scheduling;
mod slots;
mod tiers;
mod transfers;
