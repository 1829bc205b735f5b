//! The shape of a cluster on one machine: `1p2d` is one prefill and two decode workers, `3x` is three that do both.

use crate::args::RoleArg;
use std::str::FromStr;

/// Workers that one machine is asked to run at most.
const WORKERS_MAX: u32 = 64;

/// How many workers of which role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Prefill workers and decode workers.
    Disaggregated {
        /// Prefill workers.
        prefill: u32,
        /// Decode workers.
        decode: u32,
    },
    /// Workers that do both.
    DataParallel(u32),
}

impl Shape {
    /// Each worker's name and role.
    pub fn workers(self) -> Vec<(String, RoleArg)> {
        let named = |prefix: &'static str, role, count| (0..count).map(move |index| (format!("{prefix}{index}"), role));
        match self {
            Self::Disaggregated { prefill, decode } => named("p", RoleArg::Prefill, prefill)
                .chain(named("d", RoleArg::Decode, decode))
                .collect(),
            Self::DataParallel(count) => named("w", RoleArg::Both, count).collect(),
        }
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "expected `1p2d` (prefill and decode workers) or `3x`, at most {WORKERS_MAX} in all, found `{text}`"
            )
        };
        let count = |digits: &str| {
            digits
                .parse::<u32>()
                .ok()
                .filter(|count| (1..=WORKERS_MAX).contains(count))
        };
        if let Some(digits) = text.strip_suffix('x') {
            return count(digits).map(Self::DataParallel).ok_or_else(expected);
        }
        let (prefill, decode) = text
            .strip_suffix('d')
            .and_then(|text| text.split_once('p'))
            .ok_or_else(expected)?;
        match (count(prefill), count(decode)) {
            (Some(prefill), Some(decode)) if prefill + decode <= WORKERS_MAX => {
                Ok(Self::Disaggregated { prefill, decode })
            }
            _ => Err(expected()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Option<&[&str]>) {
        let names = text
            .parse::<Shape>()
            .ok()
            .map(|shape| shape.workers().into_iter().map(|(name, _)| name).collect::<Vec<_>>());
        assert_eq!(
            names,
            expected.map(|names| names.iter().map(ToString::to_string).collect()),
            "{text}"
        );
    }

    #[test]
    fn shapes() {
        check("1p2d", Some(&["p0", "d0", "d1"]));
        check("3x", Some(&["w0", "w1", "w2"]));
        for wrong in [
            "", "x", "0x", "p2d", "1p", "1p0d", "1p2", "-1x", "65x", "40p40d", "1d2p", "1.5x",
        ] {
            check(wrong, None);
        }
    }
}
