use super::*;
use crate::label::tests::{crc, label};

const POSITION: DriveId = DriveId { nguid: [1; 16], uuid: [101; 16] };

/// A file without content and without a label.
fn file(inode: u64) -> Facts {
    Facts {
        attribute: None,
        takes_attribute: true,
        labelled: None,
        reserved: None,
        place: Some(Place::of_file(inode, 5, 0)),
        device: None,
        position: POSITION,
        has_content: false,
        random: [inode as u8; 16],
    }
}

/// A device whose hardware reports this identifier.
fn device(identifier: &str) -> Facts {
    Facts {
        takes_attribute: false,
        place: Some(Place::of_device(identifier)),
        device: Some(DriveId::of_device(identifier)),
        ..file(0)
    }
}

/// The drive with a label that names this NGUID for it, and with this record in the reserved block.
fn labelled(facts: Facts, nguid: [u8; 16], record: Option<Record>) -> Facts {
    let reserved = Reserved::find(&blocks(nguid, record), crc);
    assert!(reserved.is_some());
    Facts { labelled: Some(nguid), reserved, ..facts }
}

fn blocks(nguid: [u8; 16], record: Option<Record>) -> Vec<u8> {
    let mut label = label(1);
    label.members[1].nguid = nguid;
    let mut blocks = label.encode(crc);
    label.sequence += 1;
    blocks.extend(label.encode(crc));
    blocks.extend(record.into_iter().flat_map(|record| record.encode(crc)));
    blocks.resize(3 * LABEL_LEN, 0);
    blocks
}

/// The drive as its target leaves it: with what the choice stores.
fn served(mut facts: Facts) -> (Choice, Facts) {
    let choice = choose(&facts, crc).unwrap();
    keep(&mut facts, choice.store);
    (choice, facts)
}

fn keep(facts: &mut Facts, record: Option<Record>) {
    let Some(record) = record else { return };
    let bytes = record.encode(crc);
    let takes_in_block = facts.takes_in_block(&record);
    if facts.takes_attribute {
        facts.attribute = Some(bytes.into());
    }
    if let Some(reserved) = facts.reserved.as_mut().filter(|_| takes_in_block) {
        reserved.record_block[..RECORD_LEN].copy_from_slice(&bytes);
    }
}

fn elsewhere(facts: &Facts, inode: u64) -> Facts {
    let position = DriveId { nguid: [2; 16], uuid: [102; 16] };
    Facts { position, place: Some(Place::of_file(inode, 5, 0)), ..facts.clone() }
}

#[test]
fn t27_a_drive_keeps_its_identity_at_another_position_and_a_copy_does_not_get_it() {
    let (new, drive) = served(file(7));
    assert_eq!((new.origin, new.id.nguid), (Origin::New, [7; 16]));
    assert_ne!(new.id, POSITION);
    let again = choose(&elsewhere(&drive, 7), crc).unwrap();
    assert_eq!(again, Choice { id: new.id, origin: Origin::Stored, store: None, otherwise: None });
    // The same inode number in another file.
    let later = Facts { place: Some(Place::of_file(7, 6, 0)), ..drive.clone() };
    assert_eq!(choose(&later, crc).unwrap().origin, Origin::Elsewhere);

    let copy = elsewhere(&drive, 8);
    let other = choose(&copy, crc).unwrap();
    assert_eq!((other.origin, other.store), (Origin::Elsewhere, None));
    assert!(other.id.nguid != new.id.nguid && other.id.uuid != new.id.uuid);
    assert_eq!(choose(&copy, crc).unwrap(), other, "the same each time");
    let bare = Facts { attribute: None, random: [8; 16], ..copy.clone() };
    assert_ne!(choose(&bare, crc).unwrap().id, new.id);

    // Moved to another file system.
    let mut moved = copy;
    let adopted = adopt(&moved, crc).unwrap();
    assert_eq!(adopted.id, new.id);
    keep(&mut moved, Some(adopted));
    assert_eq!(choose(&moved, crc).unwrap().id, new.id);
    assert_eq!(choose(&drive, crc).unwrap().id, new.id);
}

/// The first file of every file system has the same inode number. Some file systems do not report
/// when a file was made.
#[test]
fn t27_a_file_is_at_its_place_only_if_more_than_its_inode_number_is_the_same() {
    let at = |birth, file_system| Place::of_file(12, birth, file_system);
    let id = |place, attribute: &Option<Vec<u8>>| {
        let facts = Facts { place: Some(place), attribute: attribute.clone(), ..file(12) };
        choose(&facts, crc).unwrap()
    };
    let is_accepted = |stored: Place, now: Place| {
        let record = Record { id: POSITION, place: stored };
        let choice = id(now, &Some(record.encode(crc).into()));
        assert_eq!(choice.id == POSITION, choice.origin == Origin::Stored);
        choice.origin == Origin::Stored
    };
    assert!(is_accepted(at(5, 0), at(5, 0)) && is_accepted(at(5, 1), at(5, 0)));
    assert!(is_accepted(at(0, 1), at(0, 1)) && is_accepted(at(5, 1), at(0, 1)));
    for (stored, now) in [
        (at(5, 0), at(0, 0)),
        (at(0, 0), at(5, 0)),
        (at(0, 0), at(0, 0)),
        (at(0, 0), at(0, 1)),
        (at(5, 1), at(0, 2)),
        (at(0, 1), at(0, 2)),
        (at(5, 1), at(6, 1)),
        (at(5, 0), Place::of_file(13, 5, 0)),
    ] {
        assert!(!is_accepted(stored, now), "{stored:?} {now:?}");
    }
    // A file that could not be recognised again gets no identity of its own.
    assert_eq!(id(at(0, 0), &None), Choice { store: None, ..id(at(0, 0), &None) });
    assert_eq!(id(at(0, 0), &None).origin, Origin::Position);
}

/// Copies with `cp -a` on new file systems, in files with one inode number.
#[test]
fn t27_two_copies_on_two_file_systems_have_two_identities() {
    let (original, drive) = served(file(12));
    let copy = |birth, file_system, random| {
        let place = Some(Place::of_file(12, birth, file_system));
        choose(&Facts { place, random: [random; 16], ..drive.clone() }, crc).unwrap()
    };
    for [a, b] in [[copy(6, 0, 1), copy(7, 0, 2)], [copy(0, 1, 1), copy(0, 2, 2)]] {
        assert!(a.id.nguid != b.id.nguid && a.id.uuid != b.id.uuid);
    }
    let mut choices = [original, copy(0, 0, 1), copy(0, 0, 2)];
    distinguish(&mut choices).unwrap();
    assert_eq!(choices[0].id, original.id);
    assert!(choices[1].id != choices[2].id && choices[2].id != original.id);
    assert!(choices[1..].iter().all(|choice| choice.origin == Origin::Elsewhere));
}

#[test]
fn t27_the_drive_of_an_old_volume_is_taken_over_where_it_was_last() {
    for (facts, copy) in [(file(7), file(8)), (device("wwid a"), device("wwid b"))] {
        let (choice, drive) = served(labelled(facts.clone(), POSITION.nguid, None));
        assert_eq!((choice.id, choice.origin), (POSITION, Origin::TakenOver));
        let moved = Facts { position: DriveId { nguid: [2; 16], ..POSITION }, ..drive.clone() };
        let again = choose(&moved, crc).unwrap();
        assert_eq!((again.id, again.origin), (POSITION, Origin::Stored));
        // A copy of its blocks, at the position where it was.
        let reserved = drive.reserved.clone();
        let copied = Facts { labelled: drive.labelled, reserved, ..copy };
        let other = choose(&copied, crc).unwrap();
        assert_eq!(other.origin, Origin::Elsewhere);
        assert_ne!(other.id.nguid, POSITION.nguid);
        // The device was replaced by its copy for good.
        let mut replacement = copied;
        let adopted = adopt(&replacement, crc).unwrap();
        keep(&mut replacement, Some(adopted));
        assert_eq!(choose(&replacement, crc).unwrap().id, POSITION);
        // Never served where it was: the step is the same.
        let mut early = labelled(facts, [9; 16], None);
        assert_ne!(choose(&early, crc).unwrap().id.nguid, [9; 16]);
        let adopted = adopt(&early, crc).unwrap();
        keep(&mut early, Some(adopted));
        assert_eq!(choose(&early, crc).unwrap().id, DriveId::with_nguid([9; 16]));
    }
}

#[test]
fn t27_a_device_has_the_identity_that_its_hardware_gives() {
    let (choice, _) = served(device("wwid a"));
    assert_eq!(choice, Choice { origin: Origin::Device, store: None, ..choice });
    let labelled_by_it = labelled(device("wwid a"), choice.id.nguid, None);
    assert_eq!(choose(&labelled_by_it, crc), Ok(choice));
    let copy = labelled(device("wwid b"), choice.id.nguid, None);
    let other = choose(&copy, crc).unwrap();
    assert_eq!((other.id, other.store), (DriveId::of_device("wwid b"), None));
    assert_eq!(adopt(&device("wwid a"), crc), Err(AdoptError::NoStore));
    // Memory, and devices that report nothing.
    let nameless = Facts { place: None, device: None, ..device("") };
    assert_eq!(choose(&nameless, crc).unwrap().id, POSITION);
    assert_eq!(adopt(&labelled(nameless, [9; 16], None), crc), Err(AdoptError::NoStore));
    assert_eq!(adopt(&file(7), crc), Err(AdoptError::Nothing));
}

#[test]
fn a_drive_with_content_keeps_its_uuid_once_unless_another_drive_has_it() {
    let with_content = |inode| Facts { has_content: true, ..file(inode) };
    let choice = choose(&with_content(7), crc).unwrap();
    assert_eq!(choice.id, DriveId { nguid: [7; 16], ..POSITION });
    let plain = Facts { takes_attribute: false, ..with_content(7) };
    assert_eq!(choose(&plain, crc).unwrap().origin, Origin::Position);

    let stored = Choice { origin: Origin::Stored, store: None, otherwise: None, ..choice };
    for mut choices in [[stored, choose(&with_content(8), crc).unwrap()], [choice, stored]] {
        if choices[0].origin == Origin::New {
            choices[0] = choose(&with_content(8), crc).unwrap();
        }
        distinguish(&mut choices).unwrap();
        let new = choices.iter().find(|choice| choice.origin == Origin::New).unwrap();
        assert_eq!(new.id, DriveId::with_nguid([8; 16]));
        assert_eq!(new.store.unwrap().id, new.id);
        assert!(choices.iter().any(|choice| choice.id == stored.id));
    }
    assert_eq!(distinguish(&mut [stored, stored]), Err((0, 1)));
}

/// A copy of an old volume's drive, at the position that the drive had.
#[test]
fn t27_a_drive_is_not_taken_over_while_another_one_has_its_identity() {
    let (_, drive) = served(labelled(file(7), POSITION.nguid, None));
    let position = DriveId { nguid: [2; 16], uuid: [102; 16] };
    let original = choose(&Facts { position, ..drive }, crc).unwrap();
    for (copy, id, origin) in [
        (file(8), DriveId::with_nguid([8; 16]), Origin::New),
        (device("wwid a"), DriveId::of_device("wwid a"), Origin::Device),
    ] {
        let copy = choose(&labelled(copy, POSITION.nguid, None), crc).unwrap();
        for order in [[original, copy], [copy, original]] {
            let mut choices = order;
            distinguish(&mut choices).unwrap();
            let copy = choices.iter().find(|choice| choice.id != POSITION).unwrap();
            assert_eq!((copy.id, copy.origin), (id, origin));
            assert_eq!(copy.store.map(|record| record.id), (origin == Origin::New).then_some(id));
            assert!(choices.contains(&original));
        }
    }
}

#[test]
fn t19_a_stored_identity_is_input_too() {
    let record = Record { id: POSITION, place: Place::of_file(7, 5, 0) };
    let good = record.encode(crc);
    assert_eq!(Record::decode(&good, crc), Ok(Some(record)));
    for at in 8..RECORD_LEN {
        let mut bad = good;
        bad[at] ^= 0x10;
        assert!(Record::decode(&bad, crc).is_err(), "a flipped bit at {at}");
    }
    assert_eq!(Record::decode(&good[..95], crc), Err(RecordError::Damaged));
    assert_eq!(Record::decode(&[], crc), Ok(None));
    assert_eq!(Record::decode(&[0; LABEL_LEN], crc), Ok(None));
    let mut newer = good;
    newer[8] = 2;
    assert_eq!(Record::decode(&newer, crc), Err(RecordError::Newer(2)));
    let damaged = Facts { attribute: Some(good[..50].to_vec()), ..file(7) };
    assert_eq!(choose(&damaged, crc), Err(RecordError::Damaged));
    assert_eq!(adopt(&damaged, crc), Err(AdoptError::Record(RecordError::Damaged)));
    assert!(adopt(&labelled(damaged, [9; 16], None), crc).is_ok());
}

/// The drive had something in the reserved blocks before its volume, or a copy of its label is torn.
#[test]
fn t27_an_old_volume_is_taken_over_also_where_the_reserved_block_may_not_be_written() {
    let old = |facts: Facts, nguid| Facts { labelled: Some(nguid), ..facts };
    let (choice, drive) = served(old(file(7), POSITION.nguid));
    assert_eq!((choice.id, choice.origin), (POSITION, Origin::TakenOver));
    assert_eq!(choose(&elsewhere(&drive, 7), crc).unwrap().id, POSITION);
    // Nothing can be stored on a device, so it keeps the identity of its position only.
    let choice = choose(&old(device("wwid a"), POSITION.nguid), crc).unwrap();
    assert_eq!((choice.id, choice.origin, choice.store), (POSITION, Origin::Position, None));

    let mut moved = old(file(7), [9; 16]);
    let adopted = adopt(&moved, crc).unwrap();
    keep(&mut moved, Some(adopted));
    assert_eq!(choose(&moved, crc).unwrap().id.nguid, [9; 16]);
    assert_eq!(adopt(&old(device("wwid a"), [9; 16]), crc), Err(AdoptError::Occupied));
}

/// A plain host has written a label and a record to its own drive.
#[test]
fn t19_a_record_on_a_drive_counts_only_with_its_label_and_is_never_an_error() {
    let place = Place::of_device("wwid a");
    let forged = |label: [u8; 16], id: [u8; 16]| {
        labelled(device("wwid a"), label, Some(Record { id: DriveId::with_nguid(id), place }))
    };
    let other = choose(&forged([9; 16], [8; 16]), crc).unwrap();
    assert_eq!(other.origin, Origin::Device);
    assert!(forged([9; 16], [8; 16]).has_ignored_record(crc));
    assert!(!forged([9; 16], [9; 16]).has_ignored_record(crc));
    for at in [8, 20] {
        let mut unusable = forged([9; 16], [9; 16]);
        unusable.reserved.as_mut().unwrap().record_block[at] ^= 0x10;
        assert_eq!(choose(&unusable, crc), Ok(other));
        assert!(unusable.has_ignored_record(crc));
    }
    // It gives way to the drive whose identity it claims.
    let claimed = choose(&forged([9; 16], [9; 16]), crc).unwrap();
    assert_eq!((claimed.id.nguid, claimed.origin), ([9; 16], Origin::Stored));
    let real = Choice { id: claimed.id, origin: Origin::Device, store: None, otherwise: None };
    for mut choices in [[claimed, real], [real, claimed]] {
        distinguish(&mut choices).unwrap();
        assert!(choices.contains(&real));
        assert!(choices.iter().any(|choice| choice.id == DriveId::of_device("wwid a")));
    }
}

/// A plain host's partition table or superblock over one copy of an old label.
#[test]
fn nothing_is_stored_on_a_drive_that_may_be_a_plain_hosts() {
    let good = blocks([9; 16], None);
    let is_found = |change: &dyn Fn(&mut [u8])| {
        let mut changed = good.clone();
        change(&mut changed);
        Reserved::find(&changed, crc).is_some()
    };
    assert!(is_found(&|_| ()));
    assert!(is_found(&|blocks| blocks[..LABEL_LEN].fill(0)), "a volume that was never opened");
    for block in 0..3 {
        assert!(!is_found(&|blocks| blocks[block * LABEL_LEN..][..LABEL_LEN].fill(0x55)));
    }
    assert!(!is_found(&|blocks| blocks[..2 * LABEL_LEN].fill(0)));
    assert_eq!(Reserved::find(&good[..2 * LABEL_LEN], crc), None);
    let taken = Some(Record { id: POSITION, place: Place::of_file(7, 5, 0) });
    assert!(Reserved::find(&blocks([9; 16], taken), crc).is_some());
}

/// A start at the wrong place has stored another identity before the operator adopted the label's.
#[test]
fn t27_an_adoption_takes_the_identity_of_the_label_and_not_another_that_is_stored() {
    let (_, drive) = served(file(7));
    let mut drive = labelled(drive, [9; 16], None);
    assert_ne!(choose(&drive, crc).unwrap().id.nguid, [9; 16]);
    let adopted = adopt(&drive, crc).unwrap();
    keep(&mut drive, Some(adopted));
    assert_eq!(choose(&drive, crc).unwrap().id.nguid, [9; 16]);
}

/// Without a birth time and an identifier of its file system, a file and its copy are alike.
#[test]
fn t27_a_file_that_cannot_be_recognised_again_adopts_nothing() {
    let place = Some(Place::of_file(7, 0, 0));
    let unknown = labelled(Facts { place, ..file(7) }, [9; 16], None);
    assert_eq!(adopt(&unknown, crc), Err(AdoptError::NoStore));
    let known = Facts { place: Some(Place::of_file(7, 0, 3)), ..unknown };
    assert!(adopt(&known, crc).is_ok());
}
