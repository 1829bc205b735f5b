//! The simulator from outside: determinism first, then times that can be computed by hand, then chaos.

mod chaos;
mod common;
mod defects;
mod determinism;
mod errands;
mod faults;
mod forecasts;
mod order;
mod physics;
mod published;
mod sketches;
mod stack;
