//! Targets that answer nonsense: refused by name, and nothing is undone because of their answers
//! (T18, T19).

use riopipe_order::attribute::{Attribute, Flags, Kind, StreamId, VolumeId};
use riopipe_order::entry::Position;
use riopipe_order::ordering_log::SLOTS_MAX;
use riopipe_order::recovery::ListedEntry;
use riopipe_session::initiator::opening::{Call, Mode, OpeningError, Phase};
use riopipe_session::wire::list::Page;

use crate::world::{BLOCKS, Driver, START, VOLUME, World, entry};

fn listed(position: u64, attribute: Attribute) -> ListedEntry {
    ListedEntry {
        position: Position(position),
        attribute,
        incarnation: 1,
        persisted: true,
        durable: true,
    }
}

fn page(entries: &[ListedEntry]) -> Page {
    Page {
        volume: VOLUME,
        stream: StreamId(0),
        next: Position(entries.last().map_or(0, |last| last.position.0.wrapping_add(1))),
        live: entries.len() as u32,
        entries: entries.to_vec(),
        ..Page::default()
    }
}

/// Answers the list commands of a volume of one server and one stream with these pages.
fn answered(pages: &[Page]) -> Result<Phase, OpeningError> {
    let mut world = World::new(1, 1, |_| false);
    let mut driver = Driver::new(&world, 1, Mode::Open(world.intent()));
    driver.go_to(&mut world, Phase::List);
    for page in pages {
        let (ticket, call) = driver.opening.next_command(0).expect("one page after the other");
        assert!(matches!(call, Call::Admin { .. }));
        assert_eq!(driver.opening.next_command(0), None);
        driver.opening.on_answer(ticket, Ok(&page.encode(64 * (page.entries.len() + 1))))?;
    }
    Ok(driver.opening.phase())
}

fn refused(pages: &[Page], why: &str) {
    let error = answered(pages).unwrap_err();
    assert_eq!((error.server(), error.stream()), (Some(0), Some(StreamId(0))), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(why) && text.contains("nothing was changed"), "{text}");
}

#[test]
fn pages_that_fit_together_are_taken() {
    let (a, b) = (listed(3, entry(2, 0, 1, 1)), listed(5, entry(3, 0, 2, 1)));
    assert_eq!(answered(&[page(&[a, b])]), Ok(Phase::Decided));
    let first = Page { more: true, live: 2, ..page(&[a]) };
    let last = Page { live: 2, ..page(&[b]) };
    assert_eq!(answered(&[first, last]), Ok(Phase::Decided));
}

#[test]
fn t18_pages_that_were_not_requested_are_refused() {
    let (a, b) = (listed(3, entry(2, 0, 1, 1)), listed(5, entry(3, 0, 2, 1)));
    let wrong = "was not requested";
    refused(&[Page { stream: StreamId(1), ..page(&[a]) }], wrong);
    refused(&[Page { volume: VolumeId([8; 16]), ..page(&[a]) }], "is not valid");
    refused(&[page(&[b, a])], wrong);
    refused(&[page(&[a, a])], wrong);
    refused(&[Page { more: true, live: 2, ..page(&[]) }], wrong);
    refused(&[Page { more: true, next: Position(3), live: 2, ..page(&[a]) }], wrong);
    let first = Page { more: true, live: 2, ..page(&[a]) };
    refused(&[first.clone(), Page { live: 2, ..page(&[a]) }], wrong);
    let shorter = "length is not the stated one";
    refused(&[Page { live: 3, ..page(&[a, b]) }], shorter);
    refused(&[Page { live: 1, ..page(&[a, b]) }], shorter);
    refused(&[Page { live: 0, more: true, ..page(&[a]) }], shorter);
    refused(&[Page { live: SLOTS_MAX + 1, more: true, ..page(&[a]) }], shorter);
    let end = listed(u64::MAX, entry(2, 0, 1, 1));
    let last = Page { next: Position(u64::MAX), live: 2, more: true, ..page(&[a]) };
    refused(&[last, Page { live: 3, next: Position(0), ..page(&[end, end]) }], wrong);
    let last = Page { next: Position(u64::MAX), live: 2, more: true, ..page(&[end]) };
    refused(&[last.clone(), last], shorter);
    refused(&[Page { next: Position(5), live: 2, more: true, ..page(&[end]) }], wrong);
    refused(&[first, Page { more: true, next: Position(9), live: 3, ..page(&[b]) }], "changed");
}

#[test]
fn t18_a_list_that_changes_under_the_reader_is_refused() {
    let (a, b) = (listed(3, entry(2, 0, 1, 1)), listed(5, entry(3, 0, 2, 1)));
    let first = Page { more: true, live: 2, ..page(&[a]) };
    let last = Page { live: 2, ..page(&[b]) };
    let changes: [fn(&mut Page); 5] = [
        |page| page.released.0 += 1,
        |page| page.newest_tag.tag += 1,
        |page| page.settled = true,
        |page| page.torn += 1,
        |page| page.live += 1,
    ];
    for change in changes {
        let mut last = last.clone();
        change(&mut last);
        refused(&[first.clone(), last], "changed while it was read");
    }
}

#[test]
fn t19_an_entry_outside_the_data_area_is_never_undone() {
    let at = |lba, blocks| Attribute { lba, blocks, ..entry(2, 0, 0, 1) };
    let end = START + BLOCKS;
    for (lba, blocks) in [(0, 1), (START - 1, 2), (end - 1, 2), (end, 1), (1 << 47, 65536)] {
        let error = answered(&[page(&[listed(1, at(lba, blocks))])]).unwrap_err();
        let member = 0;
        let (server, stream, seq) = (0, StreamId(0), riopipe_order::attribute::Seq(2));
        assert_eq!(error, OpeningError::Outside { server, stream, seq, member, lba, blocks });
        assert!(error.to_string().contains("outside its data area"), "{error}");
    }
    for (lba, blocks) in [(START, 1), (end - 7, 7)] {
        assert_eq!(answered(&[page(&[listed(1, at(lba, blocks))])]), Ok(Phase::Decided));
    }
    let flush = Attribute {
        kind: Kind::Flush,
        flags: Flags::FLUSH,
        lba: 0,
        blocks: 0,
        ..entry(2, 0, 0, 1)
    };
    assert_eq!(answered(&[page(&[listed(1, flush)])]), Ok(Phase::Decided), "it has no blocks");
}

#[test]
fn t18_answers_that_cannot_be_read_are_refused() {
    let mut world = World::new(1, 1, |_| false);
    let open = |world: &World| Driver::new(world, 1, Mode::Open(world.intent())).opening;
    for answer in [vec![], vec![0; 4096], vec![0; riopipe_session::wire::STATUS_LEN]] {
        let mut opening = open(&world);
        let (ticket, _) = opening.next_command(0).unwrap();
        let error = opening.on_answer(ticket, Ok(&answer)).unwrap_err();
        assert!(matches!(error, OpeningError::Nonsense { server: 0, stream: None, .. }));
        assert_eq!(opening.next_command(0), None);
    }
    for answer in [vec![], vec![0xff; 64], vec![0; 63]] {
        let mut driver = Driver::new(&world, 1, Mode::Open(world.intent()));
        driver.go_to(&mut world, Phase::List);
        let (ticket, _) = driver.opening.next_command(0).unwrap();
        let error = driver.opening.on_answer(ticket, Ok(&answer)).unwrap_err();
        assert!(matches!(error, OpeningError::Nonsense { server: 0, stream: Some(_), .. }));
        world.initiators_die();
        world.targets[0].owner = None;
    }
}
