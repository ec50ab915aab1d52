//! Damaged images: every byte of each structure gets a few wrong values, with the checksum made right
//! again and without. The bodies and the judge are those of the fuzz target `image`.
//!
//! By default each test takes a part of the mutations. `RIOFS_DAMAGE=all` takes all of them, and
//! `RIOFS_SEED` chooses another part, and other random mutations.

#[allow(unreachable_pub, dead_code, reason = "public for the fuzz crate")]
#[path = "../../../../fuzz/src/fs.rs"]
mod bodies;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use bodies::exercise::Outcome;
use bodies::fixture::Fixture;
use bodies::places::Structure;
use bodies::{Change, Mutation, run};

use crate::enumerate::random::Random;

fn clean() -> &'static Fixture {
    static CLEAN: OnceLock<Fixture> = OnceLock::new();
    CLEAN.get_or_init(|| Fixture::clean(tempfile::TempDir::new().expect("a directory").path()))
}

fn dirty() -> &'static Fixture {
    static DIRTY: OnceLock<Fixture> = OnceLock::new();
    DIRTY.get_or_init(|| Fixture::dirty(clean()))
}

/// The values that a byte gets.
const CHANGES: [Change; 4] =
    [Change::Set(0), Change::Set(0xff), Change::Flip(0x01), Change::Flip(0x80)];

fn seed() -> u64 {
    std::env::var("RIOFS_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Every how manieth mutation is taken.
fn step(usual: usize) -> usize {
    if std::env::var("RIOFS_DAMAGE").is_ok_and(|value| value == "all") { 1 } else { usual }
}

/// Runs mutations, and panics with all that break a property.
fn judge(
    fixture: &Fixture,
    mutations: impl IntoIterator<Item = Vec<Mutation>>,
) -> Vec<(Vec<Mutation>, Outcome)> {
    let mut broken: BTreeMap<String, Vec<Vec<Mutation>>> = BTreeMap::new();
    let mut outcomes = Vec::new();
    for mutations in mutations {
        if std::env::var_os("RIOFS_TRACE").is_some() {
            eprintln!("{mutations:?}");
        }
        match catch_unwind(AssertUnwindSafe(|| run(fixture, &mutations))) {
            Ok(outcome) => outcomes.push((mutations, outcome)),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
                broken.entry(text.unwrap_or_default()).or_default().push(mutations);
            }
        }
    }
    for (text, mutations) in &broken {
        let first = &mutations[0];
        let places: Vec<_> = first.iter().map(|m| fixture.places[m.place]).collect();
        println!("{} times: {text}\n  such as {first:?}\n  of {places:?}", mutations.len());
    }
    assert!(broken.is_empty(), "{} properties are broken", broken.len());
    outcomes
}

/// Every mutation of the places that `is_meant`, one out of `step`.
fn each_byte(fixture: &Fixture, is_meant: impl Fn(Structure) -> bool, step: usize) {
    let mut all = Vec::new();
    for (number, place) in fixture.places.iter().enumerate() {
        if !is_meant(place.structure) {
            continue;
        }
        for offset in 0..place.len {
            for change in CHANGES {
                all.push(Mutation { place: number, offset, change, sealed: true });
            }
            // The checksum sees any of them.
            all.push(Mutation { place: number, offset, change: Change::Flip(4), sealed: false });
        }
    }
    let first = seed() as usize % step;
    let count = all.len();
    let outcomes =
        judge(fixture, all.into_iter().skip(first).step_by(step).map(|mutation| vec![mutation]));
    let refused = outcomes.iter().filter(|(_, outcome)| outcome.refused.is_some()).count();
    let damaged = outcomes.iter().filter(|(_, outcome)| !outcome.damage.is_empty()).count();
    println!(
        "{} of {count} mutations: {refused} mounts refused, {damaged} found later",
        outcomes.len()
    );
}

#[test]
fn without_damage_nothing_is_found() {
    for fixture in [clean(), dirty()] {
        let outcome = run(fixture, &[]);
        assert_eq!((outcome.refused, outcome.damage), (None, Vec::new()));
    }
}

#[test]
fn a_damaged_superblock_is_refused_or_harmless() {
    each_byte(clean(), |structure| structure == Structure::Superblock, step(13));
}

/// One bit of the superblock must not take all checksums out of use.
#[test]
fn a_superblock_that_loses_the_flag_for_checksums_is_refused() {
    let mutation = Mutation { place: 0, offset: 0x65, change: Change::Flip(4), sealed: false };
    assert_eq!(clean().places[0].structure, Structure::Superblock);
    for sealed in [false, true] {
        let outcome = run(clean(), &[Mutation { sealed, ..mutation }]);
        assert!(outcome.refused.is_some(), "{outcome:?}");
    }
}

#[test]
fn a_damaged_descriptor_or_bitmap_is_isolated() {
    let is_meant = |structure| {
        matches!(
            structure,
            Structure::Descriptor(_) | Structure::BlockBitmap(_) | Structure::InodeBitmap(_)
        )
    };
    each_byte(clean(), is_meant, step(9));
}

/// Space is reserved by the numbers of the descriptors, and statfs has them: all of them are tried.
#[test]
fn descriptors_with_too_many_free_blocks_are_refused() {
    let fixture = clean();
    let is_descriptor =
        |number: &usize| matches!(fixture.places[*number].structure, Structure::Descriptor(_));
    let mut mutations = Vec::new();
    for place in (0..fixture.places.len()).filter(is_descriptor) {
        for bit in 0..8 {
            // The low byte and the next one of `bg_free_blocks_count`.
            for offset in [12, 13] {
                let change = Change::Flip(1 << bit);
                mutations.push(vec![Mutation { place, offset, change, sealed: true }]);
            }
        }
        let change = Change::Set(0xff);
        mutations.push(vec![Mutation { place, offset: 12, change, sealed: true }]);
    }
    let outcomes = judge(fixture, mutations);
    assert!(outcomes.iter().any(|(_, outcome)| outcome.refused.is_some()));
}

/// With two bitmaps that are damaged, and a file that can't be cut, few blocks may be left: `NoSpace`
/// is right then, also for other files.
#[test]
fn space_in_damaged_groups_can_not_be_used() {
    let fixture = clean();
    let flipped = |place| Mutation { place, offset: 0, change: Change::Flip(20), sealed: false };
    let places = || fixture.places.iter().enumerate();
    let is_bitmap = |structure, group| structure == Structure::BlockBitmap(group);
    let bitmap = |group| {
        let found = places().find(|(_, place)| is_bitmap(place.structure, group));
        flipped(found.expect("its bitmap").0)
    };
    let inodes = places().filter(|(_, place)| matches!(place.structure, Structure::Inode(_)));
    let mutations: Vec<_> =
        inodes.map(|(place, _)| vec![bitmap(0), bitmap(1), flipped(place)]).collect();
    judge(fixture, mutations);
}

/// A new file must not get the number of a directory that is above it.
#[test]
fn inodes_in_use_that_are_free_in_the_bitmap_cause_no_circle() {
    let fixture = clean();
    let is_start = |number: &usize| {
        let place = fixture.places[*number];
        matches!(place.structure, Structure::InodeBitmap(_)) && place.from == 0
    };
    let mut mutations = Vec::new();
    for place in (0..fixture.places.len()).filter(is_start) {
        for offset in 0..8 {
            let change = Change::Set(0);
            mutations.push(vec![Mutation { place, offset, change, sealed: true }]);
        }
    }
    judge(fixture, mutations);
}

#[test]
fn a_damaged_inode_is_isolated() {
    each_byte(clean(), |structure| matches!(structure, Structure::Inode(_)), step(23));
}

#[test]
fn damaged_extents_directories_and_attributes_are_isolated() {
    each_byte(clean(), |structure| matches!(structure, Structure::Block(..)), step(13));
}

#[test]
fn damaged_journals_are_refused_or_harmless() {
    let is_meant = |structure| {
        matches!(
            structure,
            Structure::JournalSuperblock
                | Structure::LogBlock
                | Structure::LogCommit
                | Structure::LogCopy
                | Structure::Table
                | Structure::Record
        )
    };
    each_byte(dirty(), is_meant, step(23));
}

/// Without a checksum that is right, each structure is refused, and the error has its place.
#[test]
fn several_damages_at_once_are_isolated() {
    let count = if step(2) == 1 { 20_000 } else { 150 };
    for (fixture, seed) in [(clean(), seed()), (dirty(), seed() + 1000)] {
        let mut random = Random(seed);
        let mutations = (0..count).map(|_| {
            let count = 1 + random.below(4);
            let one = |random: &mut Random| {
                let place = random.below(fixture.places.len() as u64) as usize;
                let value = random.below(256) as u8;
                Mutation {
                    place,
                    offset: random.below(fixture.places[place].len as u64) as usize,
                    change: if random.below(2) == 0 {
                        Change::Set(value)
                    } else {
                        Change::Flip(1 << (value % 8))
                    },
                    sealed: random.below(8) > 0,
                }
            };
            (0..count).map(|_| one(&mut random)).collect::<Vec<_>>()
        });
        let mutations: Vec<_> = mutations.collect();
        judge(fixture, mutations);
    }
}
