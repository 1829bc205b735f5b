//! The binary `homing`: reads the command line and hands over to the crate that does the work.
fn main() {}
