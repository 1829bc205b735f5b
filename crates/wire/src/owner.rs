//! Whose a leg is: a header from the router to an embedded worker, which evicts by what it learns of who comes back.
//!
//! ```text
//! x-homing-owner: 0a1b2c3d-17/2     the router's life, its session, the kind of client
//! ```
//!
//! Sessions are numbered anew in each life of each router, so the life is part of the name; the worker makes one number of both.
//! No other engine knows the header, and none is sent it.

use homing_units::SessionId;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

/// The header's name.
pub const OWNER: &str = "x-homing-owner";

/// Whose a leg is, as a worker takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegOwner {
    /// The session: a number that no other session of any router has, but for a chance of 1 in 2^64.
    pub session: SessionId,
    /// The kind of its client.
    pub kind: u8,
}

/// Why a header says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "expected a router's life in 8 hexadecimal digits, `-`, a session's number, `/`, and a kind of client up to 255"
)]
pub struct OwnerError;

/// The header's value.
#[must_use]
pub fn encode(life: u32, session: SessionId, kind: u8) -> String {
    format!("{life:08x}-{}/{kind}", session.0)
}

/// Reads the header's value.
///
/// # Errors
/// If it has not the form that [`encode`] gives it.
pub fn parse(value: &str) -> Result<LegOwner, OwnerError> {
    let (name, kind) = value.split_once('/').ok_or(OwnerError)?;
    let (life, session) = name.split_once('-').ok_or(OwnerError)?;
    let written = encode(
        u32::from_str_radix(life, 16).map_err(|_| OwnerError)?,
        SessionId(session.parse().map_err(|_| OwnerError)?),
        kind.parse().map_err(|_| OwnerError)?,
    );
    // A number is written in one way only, so that a session has one name.
    if written != value {
        return Err(OwnerError);
    }
    Ok(LegOwner {
        session: SessionId(xxh3_64(name.as_bytes())),
        kind: kind.parse().map_err(|_| OwnerError)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_names_one_session() {
        let read = |life, session, kind| parse(&encode(life, SessionId(session), kind)).unwrap();
        let owner = read(7, 17, 2);
        assert_eq!(owner.kind, 2);
        assert_eq!(owner.session, read(7, 17, 3).session);
        for (life, session) in [(8, 17), (7, 18), (0, 0), (u32::MAX, u64::MAX)] {
            assert_ne!(owner.session, read(life, session, 2).session, "{life} {session}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for value in [
            "",
            "/",
            "-/",
            "00000007-17",
            "7-17/2",
            "00000007-17/256",
            "00000007-17/-1",
            "00000007-+17/2",
            "00000007-017/2",
            "00000007-17/2 ",
            "0000000G-17/2",
            "00000007-17/02",
            "0000000A-1/2",
            "00000007-99999999999999999999/2",
        ] {
            assert_eq!(parse(value), Err(OwnerError), "`{value}`");
        }
    }
}
