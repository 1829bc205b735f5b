//! The sessions' self-check: slow, complete, and apart from the code that it judges.

use super::{Homed, Sessions};
use homing_units::{SessionId, WorkerId};
use std::collections::BTreeMap;

impl Sessions {
    pub(crate) fn check_invariants(&self) {
        assert_eq!(
            self.blocks,
            self.iter().map(|session| session.last.blocks.len()).sum::<usize>(),
            "blocks add up"
        );
        let idle = self.iter().filter(|session| session.in_flight == 0).count();
        assert_eq!(idle, self.idle.len(), "sessions without a turn in flight are idle");
        assert!(
            idle == 0 || self.blocks <= self.limits.blocks,
            "blocks are bounded while any session may be forgotten"
        );
        let mut homed: BTreeMap<WorkerId, Homed> = BTreeMap::new();
        for session in self.iter() {
            assert!(
                self.families[&session.family].members.contains(&session.id),
                "a session is in its family"
            );
            if let Some(home) = session.home {
                homed.entry(home).or_default().add(session);
            }
        }
        for (prompt, id) in &self.by_prompt {
            assert_eq!(
                self.sessions[id].last_id,
                Some(*prompt),
                "a prompt's session has it as its last"
            );
        }
        let away = |id: &SessionId| self.sessions[id].in_flight == 0;
        assert!(
            self.changing.iter().all(|(_, id)| away(id)),
            "only of sessions that are away something else is expected"
        );
        assert_eq!(
            self.clients.away() as usize,
            self.idle.len(),
            "whoever is idle is counted as away"
        );
        let members: usize = self.families.values().map(|family| family.members.len()).sum();
        assert_eq!(members, self.sessions.len(), "each session is in one family");
        let known: BTreeMap<_, _> = self.homed.iter().filter(|(_, homed)| homed.sessions > 0).collect();
        assert_eq!(known, homed.iter().collect(), "what lives at a worker adds up");
    }
}
