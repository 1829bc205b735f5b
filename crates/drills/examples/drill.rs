//! One drill on its own seed, as `homing drill MODE` runs it, without the rest of the binary: what does not hold, and exit code 1 then.

use homing_doctor::ModeId;
use homing_drills::drill::SEED;
use homing_drills::{drill, scenario};
use std::error::Error;
use std::process::ExitCode;

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let name = std::env::args().nth(1).ok_or("expected the name of a failure mode")?;
    let scenario = ModeId::from_name(&name)
        .and_then(scenario)
        .ok_or("no such failure mode")?;
    let done = drill(scenario, SEED)?;
    for statement in done.statements.iter().filter(|statement| !statement.holds) {
        println!(
            "{}: {} against {}",
            statement.statement, statement.left, statement.right
        );
    }
    done.wrong_findings.iter().for_each(|wrong| println!("{wrong}"));
    Ok(ExitCode::from(u8::from(!done.holds)))
}
