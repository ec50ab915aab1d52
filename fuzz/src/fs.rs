//! Damaged images of `riopipe-fs-core`: bytes of a structure are changed, its checksum is made right
//! again or not, and then the file system is mounted, read, changed and unmounted.
//!
//! The properties: no panic; an end, shown by a limit of the accesses to the drive; no failure of
//! the whole file system; no write to a block that belongs to something else.

#[path = "fs/drive.rs"]
pub mod drive;
#[path = "fs/exercise.rs"]
pub mod exercise;
#[path = "fs/fixture.rs"]
pub mod fixture;
#[path = "fs/places.rs"]
pub mod places;
#[path = "fs/seal.rs"]
pub mod seal;

use std::path::Path;
use std::sync::OnceLock;

use drive::Drive;
use exercise::Outcome;
use fixture::Fixture;

/// A change of one byte of a structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mutation {
    /// The place, counted in the places of the fixture.
    pub place: usize,
    /// The byte, counted in the place.
    pub offset: usize,
    /// How it changes.
    pub change: Change,
    /// Whether the checksum of the structure is made right again.
    pub sealed: bool,
}

/// How a byte changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It gets this value.
    Set(u8),
    /// These bits change.
    Flip(u8),
}

/// The images with which [`image`] begins: an unmounted one, and one after a crash.
fn fixtures() -> &'static [Fixture] {
    static FIXTURES: OnceLock<Vec<Fixture>> = OnceLock::new();
    FIXTURES.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("riofs-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a directory");
        let clean = Fixture::clean(&dir);
        let dirty = Fixture::dirty(&clean);
        std::fs::remove_dir_all(&dir).expect("removed");
        vec![clean, dirty]
    })
}

/// The target `image`: the first byte chooses the image. Each mutation has 6 bytes: place (2),
/// offset (2), value, kind. Returns whether the file system was mounted.
pub fn image(data: &[u8]) -> bool {
    let Some((&first, rest)) = data.split_first() else { return false };
    let fixtures = fixtures();
    let fixture = &fixtures[usize::from(first) % fixtures.len()];
    let mutations: Vec<Mutation> = rest
        .as_chunks::<6>()
        .0
        .iter()
        .take(8)
        .map(|&[a, b, c, d, value, kind]| {
            let place = usize::from(u16::from_le_bytes([a, b])) % fixture.places.len();
            let len = fixture.places[place].len;
            Mutation {
                place,
                offset: usize::from(u16::from_le_bytes([c, d])) % len,
                change: if kind & 2 == 0 { Change::Set(value) } else { Change::Flip(value) },
                sealed: kind & 1 == 0,
            }
        })
        .collect();
    run(fixture, &mutations).is_mounted
}

/// Changes the image of a fixture, and uses it.
///
/// Panics if a property does not hold.
pub fn run(fixture: &Fixture, mutations: &[Mutation]) -> Outcome {
    let mut image = fixture.image.clone();
    for mutation in mutations {
        fixture.apply(&mut image, mutation);
    }
    let are_aliased = mutations.iter().any(|mutation| fixture.may_alias(mutation));
    let drive = Drive::new(image, fixture.protected(are_aliased));
    let is_witness_sound = !mutations.iter().any(|mutation| fixture.concerns_all(mutation));
    exercise::exercise(&drive, is_witness_sound && !are_aliased)
}

/// An image made by `mke2fs`, in a file of `dir`.
pub fn make_image(dir: &Path, blocks: u64, options: &[&str]) -> Vec<u8> {
    let path = dir.join("fixture.img");
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(blocks * 4096).expect("a sparse file");
    drop(file);
    let run = |program: &str| {
        std::process::Command::new(program)
            .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256"])
            .args(options)
            .arg(&path)
            .env("E2FSPROGS_FAKE_TIME", "1700000000")
            .status()
    };
    let status = run("mke2fs").or_else(|_| run("/usr/sbin/mke2fs"));
    assert!(status.expect("mke2fs of e2fsprogs").success(), "mke2fs {options:?}");
    std::fs::read(&path).expect("the image")
}
