//! The texts of earlier prompts in segments, each with its tokens and block hashes: a tree in which prompts with a common
//! beginning share it.
//!
//! A segment ends before a marker (`cuts.rs`) and holds that marker at its end, as what must follow. Where a segment ends
//! depends on its own text alone, so that two prompts that agree are cut at the same places. Finding a known beginning is
//! comparing bytes: the child that was used last is tried first, and only where another one follows (a thousand sessions
//! behind one system prompt) the next segment is cut out and looked up by a hash of its text. Hashes find, bytes decide.
//!
//! Memory is bounded in bytes. What goes is the leaf that was not used for longest: a prompt loses its end before its
//! beginning, and what many prompts share goes last.

use crate::cuts::{Cut, Cuts};
use homing_kv::BlockHash;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

/// What a segment costs beside its text, tokens and hashes, in bytes: a node, its places in the maps, four allocations.
const SEGMENT_OVERHEAD: usize = 320;

/// A segment larger than the whole memory divided by this is not kept: it would push out everybody else.
const LARGEST_SHARE: usize = 8;

/// A piece of a text from the beginning or a marker up to another marker.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Its text, and the marker after it.
    text: Box<str>,
    /// Bytes of text without that marker.
    pub(crate) length: usize,
    pub(crate) tokens: Box<[u32]>,
    /// Hashes of the blocks that end in this segment.
    pub(crate) hashes: Box<[BlockHash]>,
}

impl Segment {
    /// A segment of `text`, of which the last bytes after `length` are the marker that follows.
    pub(crate) fn new(text: &str, length: usize, tokens: &[u32], hashes: &[BlockHash]) -> Self {
        Self {
            text: text.into(),
            length,
            tokens: tokens.into(),
            hashes: hashes.into(),
        }
    }

    fn bytes(&self) -> usize {
        SEGMENT_OVERHEAD + self.text.len() + size_of_val(&*self.tokens) + size_of_val(&*self.hashes)
    }
}

/// Cuts texts into segments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segmenter {
    /// Shortest segment, in bytes, at least 1: short messages share one.
    pub(crate) bytes_min: usize,
}

impl Segmenter {
    /// Where the segment that begins at this byte ends: a matter of its own text alone.
    pub(crate) fn next(self, text: &str, from: usize, cuts: &Cuts) -> Option<Cut> {
        cuts.next(text, from + self.bytes_min)
    }
}

/// A place in the tree. A number is used once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place(u64);

/// What is known of a text.
#[derive(Debug)]
pub(crate) struct Known {
    /// Where it ends in the tree.
    pub(crate) place: Place,
    pub(crate) segments: Vec<Arc<Segment>>,
    /// Bytes of text that they cover.
    pub(crate) length: usize,
}

/// The tree.
#[derive(Debug)]
pub(crate) struct Tree {
    segmenter: Segmenter,
    bytes_max: usize,
    bytes: usize,
    /// Counts places, and uses of them.
    next: u64,
    nodes: HashMap<Place, Node>,
    /// Children by their parent and the hash of their text.
    children: HashMap<(Place, u64), Place>,
    /// Places without children, longest unused first.
    leaves: BTreeMap<(u64, Place), ()>,
    hasher: RandomState,
}

#[derive(Debug)]
struct Node {
    /// `None` for a root.
    under: Option<Under>,
    children: usize,
    /// The child that was used last.
    favourite: Option<Place>,
    used: u64,
}

/// Where a node that is no root hangs, and what it holds.
#[derive(Debug)]
struct Under {
    parent: Place,
    hash: u64,
    segment: Arc<Segment>,
}

impl Tree {
    /// A tree of so many roots: places `0..roots`.
    pub(crate) fn new(roots: u64, segmenter: Segmenter, bytes_max: usize) -> Self {
        let root = || Node {
            under: None,
            children: 0,
            favourite: None,
            used: 0,
        };
        Self {
            segmenter,
            bytes_max,
            bytes: 0,
            next: roots,
            nodes: (0..roots).map(|number| (Place(number), root())).collect(),
            children: HashMap::new(),
            leaves: BTreeMap::new(),
            hasher: RandomState::new(),
        }
    }

    /// A root.
    pub(crate) const fn root(number: u64) -> Place {
        Place(number)
    }

    /// Bytes that are held.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Follows a text from a root as far as it is known.
    pub(crate) fn follow(&mut self, root: Place, text: &str, cuts: &Cuts) -> Known {
        let used = self.count();
        let mut known = Known {
            place: root,
            segments: Vec::new(),
            length: 0,
        };
        while let Some((child, segment)) = self.child(known.place, text, known.length, cuts) {
            if let Some(node) = self.nodes.get_mut(&known.place) {
                node.favourite = Some(child);
            }
            self.touch(child, used);
            known.place = child;
            known.length += segment.length;
            known.segments.push(segment);
        }
        known
    }

    /// The child of a place whose segment a text has from a byte on.
    fn child(&self, place: Place, text: &str, from: usize, cuts: &Cuts) -> Option<(Place, Arc<Segment>)> {
        let node = self.nodes.get(&place).filter(|node| node.children > 0)?;
        let rest = &text.as_bytes()[from..];
        let matching = |child: Place| {
            let segment = &self.nodes.get(&child)?.under.as_ref()?.segment;
            let same = rest.starts_with(segment.text.as_bytes());
            same.then(|| (child, Arc::clone(segment)))
        };
        node.favourite.and_then(matching).or_else(|| {
            let cut = self.segmenter.next(text, from, cuts)?;
            let hash = self.hasher.hash_one(&text[from..cut.end]);
            self.children.get(&(place, hash)).copied().and_then(matching)
        })
    }

    fn touch(&mut self, place: Place, used: u64) {
        let Some(node) = self.nodes.get_mut(&place) else {
            return;
        };
        let before = std::mem::replace(&mut node.used, used);
        if self.leaves.remove(&(before, place)).is_some() {
            self.leaves.insert((used, place), ());
        }
    }

    /// Hangs segments one below the other under a place, as far as that is possible, and forgets what is too much.
    pub(crate) fn grow(&mut self, place: Place, segments: Vec<Segment>) {
        let mut parent = place;
        for segment in segments {
            match self.hang(parent, segment) {
                Some(child) => parent = child,
                None => break,
            }
        }
        while self.bytes > self.bytes_max && self.forget_one() {}
    }

    /// `None` if the place is gone, the segment is too large, or another text has its hash.
    fn hang(&mut self, parent: Place, segment: Segment) -> Option<Place> {
        if segment.bytes() > self.bytes_max / LARGEST_SHARE {
            return None;
        }
        let used = self.count();
        let hash = self.hasher.hash_one(&*segment.text);
        if let Some(child) = self.children.get(&(parent, hash)).copied() {
            // Another request has brought the same text meanwhile.
            let same = self.nodes.get(&child)?.under.as_ref()?.segment.text == segment.text;
            self.touch(child, used);
            return same.then_some(child);
        }
        let above = self.nodes.get_mut(&parent)?;
        let child = Place(used);
        if above.children == 0 {
            self.leaves.remove(&(above.used, parent));
        }
        above.children += 1;
        above.favourite = Some(child);
        self.bytes += segment.bytes();
        let node = Node {
            under: Some(Under {
                parent,
                hash,
                segment: Arc::new(segment),
            }),
            children: 0,
            favourite: None,
            used,
        };
        self.nodes.insert(child, node);
        self.children.insert((parent, hash), child);
        self.leaves.insert((used, child), ());
        Some(child)
    }

    /// The number that the next use gets.
    pub(crate) const fn next_use(&self) -> u64 {
        self.next
    }

    /// Forgets up to `limit` leaves that were last used before this use; whether there are more.
    pub(crate) fn forget_before(&mut self, used: u64, limit: usize) -> bool {
        let is_older = |tree: &Self| {
            let oldest = tree.leaves.first_key_value();
            oldest.is_some_and(|((last, _), ())| *last < used)
        };
        for _ in 0..limit {
            if !is_older(self) || !self.forget_one() {
                return false;
            }
        }
        is_older(self)
    }

    /// Forgets the leaf that was not used for longest.
    fn forget_one(&mut self) -> bool {
        let Some(((_, leaf), ())) = self.leaves.pop_first() else {
            return false;
        };
        let node = self.nodes.remove(&leaf).expect("a leaf is a node");
        let under = node.under.expect("a root is no leaf");
        self.children.remove(&(under.parent, under.hash));
        self.bytes -= under.segment.bytes();
        let above = self.nodes.get_mut(&under.parent).expect("a node with children stays");
        above.children -= 1;
        if above.favourite == Some(leaf) {
            above.favourite = None;
        }
        if above.children == 0 && above.under.is_some() {
            self.leaves.insert((above.used, under.parent), ());
        }
        true
    }

    fn count(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// Checks that the maps agree.
    ///
    /// # Panics
    /// If they do not.
    #[cfg(test)]
    pub(crate) fn check_invariants(&self) {
        let (mut bytes, mut leaves, mut under_nodes) = (0, 0, 0);
        for (place, node) in &self.nodes {
            let children = self.children.iter().filter(|((parent, _), _)| parent == place).count();
            assert_eq!(children, node.children, "children of {place:?}");
            let favourite = node.favourite.and_then(|child| self.nodes.get(&child));
            assert_eq!(favourite.is_some(), node.favourite.is_some(), "a favourite exists");
            let Some(under) = &node.under else { continue };
            bytes += under.segment.bytes();
            under_nodes += 1;
            assert!(self.nodes.contains_key(&under.parent), "a parent stays");
            assert_eq!(self.children.get(&(under.parent, under.hash)), Some(place));
            let leaf = self.leaves.contains_key(&(node.used, *place));
            assert_eq!(leaf, node.children == 0, "a leaf has no children");
            leaves += usize::from(leaf);
        }
        assert_eq!((bytes, leaves), (self.bytes, self.leaves.len()), "bytes and leaves");
        assert_eq!(under_nodes, self.children.len(), "each node is found by its text");
        assert!(self.bytes <= self.bytes_max, "bounded");
    }
}
