//! Prints `docs/failure-modes.md`.

fn main() {
    print!("{}", homing_drills::document::failure_modes());
}
