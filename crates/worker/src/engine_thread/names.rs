//! Which request, live or held for a puller, goes by which name of its client's.
//!
//! Whoever asked for an export may give it up before its answer has told it what the export is called here: all that it knows
//! is what it called its own request. Two requests of one name are the client's mistake; the later one is meant then.

use homing_units::RequestId;
use std::collections::HashMap;
use std::sync::Arc;

/// The names of requests that ask for an export. Bounded by the live requests and the exports that the pool has room for.
#[derive(Debug, Default)]
pub(super) struct ExportNames {
    ids: HashMap<Arc<str>, RequestId>,
    names: HashMap<RequestId, Arc<str>>,
}

impl ExportNames {
    /// A request goes by this name from now on.
    pub(super) fn insert(&mut self, id: RequestId, name: String) {
        let name: Arc<str> = name.into();
        self.ids.insert(name.clone(), id);
        self.names.insert(id, name);
    }

    /// The request that goes by this name.
    pub(super) fn find(&self, name: &str) -> Option<RequestId> {
        self.ids.get(name).copied()
    }

    /// A request has ended, and nothing is held for it.
    pub(super) fn remove(&mut self, id: RequestId) {
        let Some(name) = self.names.remove(&id) else { return };
        if self.ids.get(&name) == Some(&id) {
            self.ids.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_later_of_two_requests_of_one_name_is_meant() {
        let mut names = ExportNames::default();
        names.insert(RequestId(1), "a".to_owned());
        names.insert(RequestId(2), "a".to_owned());
        names.insert(RequestId(3), "b".to_owned());
        assert_eq!(names.find("a"), Some(RequestId(2)));
        names.remove(RequestId(1));
        assert_eq!(
            names.find("a"),
            Some(RequestId(2)),
            "the earlier one's end says nothing of it"
        );
        names.remove(RequestId(2));
        names.remove(RequestId(2));
        assert_eq!((names.find("a"), names.find("b")), (None, Some(RequestId(3))));
        names.remove(RequestId(3));
        assert!(names.ids.is_empty() && names.names.is_empty());
    }
}
