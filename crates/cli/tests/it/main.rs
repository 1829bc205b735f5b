//! The binary as its users meet it: one test program, so that it is linked once.

mod common;
mod compare;
mod doctor;
mod doctor_live;
mod endings;
mod simulate;
mod trace;
mod up;
mod usage;
