//! How a command fails: exit code 1 when the work failed, 2 when it was asked for in a wrong way.

use std::fmt;

/// Wrong usage or input: one line that says what was expected, exit code 2.
#[derive(Debug)]
pub struct Usage(String);

impl Usage {
    /// An error for [`anyhow`] with this line.
    pub fn error(line: impl fmt::Display) -> anyhow::Error {
        anyhow::Error::new(Self(line.to_string()))
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// The exit code for an error.
pub fn exit_code(error: &anyhow::Error) -> u8 {
    if error.chain().any(|cause| cause.is::<Usage>()) {
        2
    } else {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn usage_is_found_below_its_context() {
        assert_eq!(exit_code(&Usage::error("expected a trace")), 2);
        let wrapped = Err::<(), _>(Usage::error("expected a trace"))
            .context("reading")
            .expect_err("an error");
        assert_eq!(exit_code(&wrapped), 2);
        assert_eq!(exit_code(&anyhow::anyhow!("broken")), 1);
    }
}
