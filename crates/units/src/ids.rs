//! Ids are counters: equal in every run of the same seed, cheap to compare, and no two kinds can be confused.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A worker of the fleet, counted from 0 in the order of the configuration.
    WorkerId(u32), "w"
);
id!(
    /// A request of a client (one turn of a session), counted from 0 by the shell that received it.
    RequestId(u64), "r"
);
id!(
    /// A session as the router knows it, counted from 0 by the router core.
    SessionId(u64), "s"
);
id!(
    /// One life of a worker process: it differs after every restart. 0 means "not known yet".
    BootEpoch(u64), "e"
);
