//! The members by which a router tells SGLang where a request belongs, and that a client has no business setting.
//!
//! A handoff is a meeting: the router sends the same request to a prefill and a decode server at once, with the prefill
//! server's bootstrap address and a number (`bootstrap_room`) that nobody else uses. The decode server asks there where to
//! receive, and the prefill server pushes. Neither answers before the other has been met.

use crate::openai::Body;

/// Where two legs meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bootstrap {
    /// The prefill server's host, an IPv6 address in brackets.
    pub host: String,
    /// Its bootstrap port.
    pub port: u16,
    /// The number of the meeting; see [`room`].
    pub room: u64,
}

/// What a router sets in the body of a leg.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routing {
    /// The leg's name, by which it can be aborted. None may begin with another's: SGLang aborts all that do.
    pub rid: String,
    /// Where the two legs of a handoff meet; `None` for a leg that prefills and decodes alone.
    pub bootstrap: Option<Bootstrap>,
    /// The engine of a data-parallel server.
    pub rank: Option<u32>,
    /// The engine of the data-parallel prefill server that computes the prompt, for both legs of a handoff.
    pub prefill_rank: Option<u32>,
    /// A decode server is to prefill this one itself: only where it says that it can.
    pub local_prefill: bool,
    /// The session that the leg belongs to, where the server keeps sessions apart in its cache.
    pub session_id: Option<String>,
}

/// Members that are the router's to set. A client's own are cut: they would reach into other requests.
pub const ROUTING_FIELDS: [&str; 10] = [
    "rid",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    // The name of `routed_dp_rank` in earlier releases.
    "data_parallel_rank",
    "do_local_prefill",
    "session_params",
    // vLLM's.
    "kv_transfer_params",
];

impl Routing {
    /// Sets these members, and removes those of the kind that are not these.
    pub fn apply(&self, body: &mut Body) {
        for name in ROUTING_FIELDS {
            body.remove(name);
        }
        body.set("rid", &self.rid);
        if let Some(Bootstrap { host, port, room }) = &self.bootstrap {
            body.set("bootstrap_host", host);
            body.set("bootstrap_port", port);
            body.set("bootstrap_room", room);
        }
        if let Some(rank) = self.rank {
            body.set("routed_dp_rank", &rank);
        }
        if let Some(rank) = self.prefill_rank {
            body.set("disagg_prefill_dp_rank", &rank);
        }
        if self.local_prefill {
            body.set("do_local_prefill", &true);
        }
        if let Some(session) = &self.session_id {
            body.set("session_id", session);
        }
    }
}

/// The number of a meeting: 1 to 2^63 - 1, from 64 random bits. A data-parallel prefill server finds the engine by the
/// number's remainder, unless told otherwise, and fails where it was told otherwise: so the number agrees with `rank` of `ranks`.
/// 0 is what SGLang's buffers hold before anything has arrived.
#[must_use]
pub fn room(random: u64, rank: u32, ranks: u32) -> u64 {
    const BITS: u64 = (1 << 63) - 1;
    let (rank, ranks) = (u64::from(rank), u64::from(ranks.max(1)));
    let random = random & BITS;
    let first = random - random % ranks;
    let fitting = first + rank % ranks;
    match fitting {
        0 => ranks,
        fitting if fitting > BITS => fitting - ranks,
        fitting => fitting,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;

    fn check(routing: &Routing, body: &'static str, expected: &str) {
        let mut body = Body::parse(&Bytes::from_static(body.as_bytes())).expect(body);
        routing.apply(&mut body);
        assert_eq!(str::from_utf8(&body.to_bytes()), Ok(expected));
    }

    #[test]
    fn a_handoff_says_where_to_meet() {
        let routing = Routing {
            rid: "r-0d".to_owned(),
            bootstrap: Some(Bootstrap {
                host: "10.0.0.5".to_owned(),
                port: 8998,
                room: 42,
            }),
            rank: Some(1),
            prefill_rank: Some(3),
            ..Routing::default()
        };
        check(
            &routing,
            r#"{"model":"m","bootstrap_room":7,"prompt":[1]}"#,
            r#"{"model":"m","prompt":[1],"rid":"r-0d","bootstrap_host":"10.0.0.5","bootstrap_port":8998,"bootstrap_room":42,"routed_dp_rank":1,"disagg_prefill_dp_rank":3}"#,
        );
    }

    #[test]
    fn what_a_client_says_of_routing_is_cut() {
        let alone = Routing {
            rid: "r-0d".to_owned(),
            local_prefill: true,
            session_id: Some("s".to_owned()),
            ..Routing::default()
        };
        check(
            &alone,
            r#"{"rid":"mine","bootstrap_host":"2.2.2.2","bootstrap_port":1,"data_parallel_rank":0,"prompt":"p","kv_transfer_params":{}}"#,
            r#"{"prompt":"p","rid":"r-0d","do_local_prefill":true,"session_id":"s"}"#,
        );
    }

    proptest! {
        #[test]
        fn a_room_is_a_positive_number_that_agrees_with_its_rank(random in any::<u64>(), rank in 0_u32..64, more in 1_u32..64) {
            let ranks = rank + more;
            let room = room(random, rank, ranks);
            prop_assert!(room > 0 && i64::try_from(room).is_ok());
            prop_assert_eq!(room % u64::from(ranks), u64::from(rank));
        }
    }

    #[test]
    fn the_ends_of_the_range() {
        assert_eq!(room(0, 0, 1), 1);
        assert_eq!(room(0, 0, 8), 8);
        assert_eq!(room(u64::MAX, 0, 1), (1 << 63) - 1);
        assert!(i64::try_from(room(u64::MAX, 9, 10)).is_ok());
    }
}
